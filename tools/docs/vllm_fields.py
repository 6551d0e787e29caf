"""Write the table of docs/guide/vllm.md: what applies each field of a config on vLLM.

Run `python tools/docs/vllm_fields.py` after a change of src/descant/engine/vllm/field_support.py.
"""

from __future__ import annotations

from pathlib import Path

from descant.engine.vllm.field_support import FIELD_SUPPORT

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "vllm.md"
BEGIN, END = "<!-- fields: begin -->", "<!-- fields: end -->"
TITLES = {
    "vllm": "Applied by vLLM",
    "plug-in": "Applied by the plug-in",
    "engine": "Applied by `descant.VLLM` alone",
    "refused": "Refused",
}


def tables() -> str:
    """One table for each of `TITLES`."""
    parts = []
    for by, title in TITLES.items():
        rows = [f"| `{name}` | {one.note} |" for name, one in FIELD_SUPPORT.items() if one.by == by]
        parts.append("\n".join([f"### {title}\n", "| field | how or why |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def page(text: str) -> str:
    """The page with new tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
