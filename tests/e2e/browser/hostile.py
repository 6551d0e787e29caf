"""Texts that attempt injection, for tokens, names and settings."""

from __future__ import annotations

from collections.abc import Iterator

HIT = "top.hit=1"  # what runs if any of them gets its way

_SCRIPTS = (
    "<script>{}</script>",
    "<script src=data:text/javascript,{}></script>",
    "</script><script>{}</script>",
    "<!--<script>{}",
    "--!><script>{}</script>",
    "<noscript><p title='</noscript><img src=x onerror={}>'>",
    "</textarea><script>{}</script>",
    "</iframe><script>{}</script>",
    "</noembed><script>{}</script>",
    "<scr<script>ipt>{}</scr</script>ipt>",
    "<svg><script xlink:href='data:text/javascript,{}'/></svg>",
    "<!DOCTYPE html><script>{}</script>",
    "%3Cscript%3E{}%3C/script%3E",
)
_HANDLERS = (
    "<img src=x onerror={}>",
    "<img src=`x` onerror=`{}`>",
    "<body onload={}>",
    "<svg><animate onbegin={} attributeName=x dur=1s>",
    "<svg><use href='data:image/svg+xml,<svg id=x onload={}>#x'/></svg>",
    "<input autofocus onfocus={}>",
    "<video><source onerror={}></video>",
    "<iframe onload={}></iframe>",
    "<div style=animation-name:x onanimationstart={}>x</div>",
    "<b onpointerenter={}>x</b>",
    '" onmouseover="{}" x="',
    "` onmouseover=`{}`",
    '" autofocus onfocus="{}',
    "<popover id=x onbeforetoggle={}>x",
)
_ADDRESSES = (
    "javascript:{}",
    "java\nscript:{}",
    "<a href=javascript:{}>x</a>",
    "<iframe src=javascript:{}></iframe>",
    '"></iframe><iframe srcdoc="<script>{}</script>',
    "<form action=javascript:{}><button>x</button></form>",
    "<base href=//evil.test/>",
    "<meta http-equiv=Content-Security-Policy content=\"script-src 'unsafe-inline'\">",
    "vbscript:{}",
    "file:///etc/passwd",
    "<link rel=stylesheet href=https://evil.test/x.css>",
    "<img srcset='https://evil.test/x.png 2x'>",
    "<video poster=https://evil.test/x.png>",
)
_STYLES = (
    "<style>*{display:none}</style>",
    "</style><style>body{background:red}</style>",
    "<style>@import 'https://evil.test/x.css'</style>",
    "<p style=position:fixed;inset:0;background:red>x</p>",
    "<div style=\"background:url('https://evil.test/')\">x</div>",
    ";background:url(https://evil.test/)",
    "red;}*{display:none}",
    "expression({})",
    "}</style><script>{}</script>",
    "/* */ } body { display: none } /*",
    "*/body{display:none}/*",
    "url(javascript:{})",
    "var(--x);color:red",
    "\\3c script\\3e",
    "@font-face{font-family:x;src:url(https://evil.test/)}",
)
_ENTITIES = (
    "&lt;script&gt;{}&lt;/script&gt;",
    "&#60;script&#62;{}&#60;/script&#62;",
    "&lt",
    "&NotAnEntity;",
    "&&amp;&#;&#x;",
    "&#xD800;",
    "&#128;",
    "&NewLine;&Tab;",
    ">",
    "<!",
    "-->",
    "?>",
    "<![CDATA[",
    "<!DOCTYPE x [<!ENTITY y 'z'>]>&y;",
    "%y;",
    "'",
    "\\",
    "\"}]}</script>",
    "${{{}}}",
    "<%= {} %>",
)  # fmt: skip
_NAMES = (
    "__proto__",
    "prototype",
    "toString",
    "__defineGetter__",
    "constructor.prototype.hit",
    "innerHTML",
    "style",
    "then",
    "undefined",
    "NaN",
    "Infinity",
    "1e309",
    "[object Object]",
    "scene",
    "data-node",
)
_DIRECTIONS = tuple(
    before + "abc" + after
    for before, after in (
        ("\u202e", ""), ("\u202e", "\u202c"), ("\u202d", ""), ("\u202a", ""), ("\u202b", ""), ("\u2066", ""),
        ("\u2067", ""), ("\u2068", ""), ("\u2069", ""), ("\u200e", ""), ("\u200f", ""), ("\u061c", ""),
        ("\u05d0\u05d1 <b>", "\u05d2"), ("\u0627\u0644", "\u202e)(1+2"), ("", "\u2067\u202e\u2066\u202d"),
        ("\u2067" * 130, ""),
    )
)  # fmt: skip
_UNSEEN = (
    "\u200b", "a\u200bb", "\u200c", "a\u200cb", "\u200d", "a\u200db", "\u2060", "\u2061", "\u2062", "\u2063",
    "\u2064", "\u206a", "\u206f", "\ufeff", "\ufeffBOM", "a\ufeffb", "\u00ad", "soft\u00adhyphen", "\u034f",
    "\u115f", "\u1160", "\u17b4", "\u180e", "\u2800", "\u3164", "\uffa0", "\ufe00", "\ufe0f", "a\ufe0fb",
    "\U000e0100", "\U000e0001\U000e0041", "\U000e0073\U000e0063\U000e007f", "\u00a0", "\u2003\u2009\u202f",
    "\u3000", "\u2028", "\u2029", "\u0085", "\ufff9a\ufffab\ufffb", "\ufffc", "\ufffd", "\ue000", "\uf8ff",
    "\U000f0000", "\U0010ffff", "\ufffe", "\uffff", "\ufdd0", "\u0378", "\U0001fbfa",
)  # fmt: skip
_BYTES = (
    b"\xe4", b"\xc3", b"\xa9", b"\xc3\x28", b"\xff", b"\xfe", b"\xfe\xff", b"\xff\xfe", b"\xc0\xaf",
    b"\xc0\xbcscript\xc0\xbe", b"\xe0\x80\xaf", b"\xed\xa0\x80", b"\xed\xb0\x80", b"\xf0\x9f",
    b"\xf0\x9f\x98", b"\x9f\x98\x80", b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80", b"\x80\x80\x80\x80",
    b"a\xe2\x80", b"\xaeb", b"<script>\xe4</script>", b"\xe4<img src=x onerror=top.hit=1>",
)  # fmt: skip
_BROKEN = (
    *(given.decode("utf-8", "surrogateescape") for given in _BYTES),
    *("\ud800", "\udbff", "\udc00", "\udfff", "\ud83d", "\ude00", "a\ud800b", "\ud800<b>", "\udc7f"),
)
_CONTROLS = (
    *(chr(number) for number in (*range(0x20), 0x7F, *range(0x80, 0xA0, 6))),
    "\n\n\n",
    "<scr\x00ipt>{}</scr\x00ipt>",
    "a\bb\b\b",
    "\x1b[31mred\x1b[0m",
    "\x1b[1A\x1b[2K",
    "\x1b]8;;https://evil.test/\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[6n",
    "\x1bP$qm\x1b\\",
    "\x1b(0lqk\x1b(B",
    "\x9d0;title\x9c",
    "\x1b[8m hidden",
    "[red]rich[/red]",
    "[/]",
    ":smile:",
)
_HEAPS = (
    "\u0301",
    "Z" + "\u0300\u0301\u0302\u0303" * 100,
    "\u0e49" * 40,
    "x" * 20_000,
    "\u6f22" * 5_000,
    "&amp;" * 2_000,
    "\t" * 200,
    "\u202e" * 300,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f44d\U0001f3fd",
    "\u2764\ufe0f\u200d\U0001f525",
    "1\ufe0f\u20e3",
    "\u1100\u1161\u11a8" * 50,
    "\ufdfd" * 20,
    "\u2e3b" * 100,
)

FAMILIES: dict[str, tuple[str, ...]] = {
    "scripts": _SCRIPTS,
    "handlers": _HANDLERS,
    "addresses": _ADDRESSES,
    "styles": _STYLES,
    "entities": _ENTITIES,
    "names": _NAMES,
    "directions": _DIRECTIONS,
    "unseen": _UNSEEN,
    "broken": _BROKEN,
    "controls": _CONTROLS,
    "heaps": _HEAPS,
}


def cases() -> Iterator[tuple[str, str]]:
    """Every case: its family and its text."""
    for family, texts in FAMILIES.items():
        for text in texts:
            yield family, text.replace("{}", HIT)


def of(family: str) -> list[str]:
    """The texts of a family."""
    return [text for name, text in cases() if name == family]
