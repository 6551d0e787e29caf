"""The report of a job: one HTML page that needs nothing else, with figures, pictures and a sample of rows."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import descant
from descant.core.atomic_file import write_text
from descant.jobs.report_charts import (
    NUM_SHARE_COLOURS,
    SAMPLED_ROWS,
    JobFigures,
    ValueScale,
    collect_figures,
    counted,
    draw_acceptance,
    draw_histogram,
    draw_shares,
    format_share,
    short_count,
)
from descant.tokenization.display import escape_invisible

_MAX_TEXT_CHARS: Final = 900
_MAX_VALUE_CHARS: Final = 240
_MAX_NAME_CHARS: Final = 120
_MAX_SHOWN_COLUMNS: Final = 8
_MAX_SHOWN_COMPLETIONS: Final = 4
_FINISH_REASONS: Final = {
    "eos": "end token",
    "length": "length limit",
    "stop": "stop condition",
    "time": "time limit",
}
_RESULT_KEYS: Final = ("row", "id", "completions")


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """The facts of a report besides the results: the job, and the figures of its last run."""

    title: str
    model: str
    source: Sequence[str]  # its files
    rows: int  # of the source
    settings: Mapping[str, Any] = field(default_factory=dict)  # generation and selection parameters
    unique_rows: int | None = None  # of different texts; None: not counted
    # Of the run that has computed the last shards:
    generated_tokens: int | None = None  # those of completions that were not selected included
    seconds: float | None = None
    drafted: Sequence[int] = ()  # draft tokens that were fed, by their index in a draft
    accepted: Sequence[int] = ()  # and those of them that were accepted


def write_report(
    path: Path,
    facts: ReportFacts,
    results: Iterable[Mapping[str, Any]],
    errors: Iterable[Mapping[str, Any]],
) -> None:
    """Write the report of a job's results and errors, each read once, in the order of the source."""
    write_text(path, render_report(facts, collect_figures(results, errors)))


def render_report(facts: ReportFacts, figures: JobFigures) -> str:
    """The page; the same facts and figures give the same bytes."""
    assets = files("descant.jobs") / "assets"
    style = (assets / "report.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    body = [
        _heading(facts),
        _tiles(facts, figures),
        _cards(facts, figures),
        _errors(figures),
        _sample(figures),
        f"<footer>Made by Descant {html.escape(descant.__version__)}</footer>",
    ]
    page = (assets / "report.html").read_text("utf-8")
    return page.format(
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        title=_plain(facts.title),
        style=style,
        body="\n".join(part for part in body if part),
    )


# ------------------------------------------------------------------------ head
def _heading(facts: ReportFacts) -> str:
    chips = "".join(
        f'<li><span class="key">{_plain(name)}</span> {_value(value)}</li>'
        for name, value in facts.settings.items()
    )
    sources = ", ".join(_plain(name) for name in list(facts.source)[:3])
    if len(facts.source) > 3:
        sources += f" and {len(facts.source) - 3} more"
    return (
        f"<header><h1>{_plain(facts.title)}</h1>"
        f'<p class="origin"><b>{_plain(facts.model)}</b> on <b>{sources}</b></p>'
        + (f'<ul class="chips">{chips}</ul>' if chips else "")
        + "</header>"
    )


def _tiles(facts: ReportFacts, figures: JobFigures) -> str:
    missing = facts.rows - figures.results - figures.failed
    tiles = [
        ("rows", f"{facts.rows:,}", f"{missing:,} not computed yet" if missing > 0 else "of the source"),
        ("results", f"{figures.results:,}", format_share(figures.results, facts.rows) + " of the rows"),
        ("failed", f"{figures.failed:,}", format_share(figures.failed, facts.rows) + " of the rows"),
        ("tokens", short_count(figures.tokens), f"{figures.lengths.mean:,.1f} a completion"),
    ]
    if figures.completions > figures.results:
        many = f"{figures.completions / max(figures.results, 1):.1f} a row".replace(".0 ", " ")
        tiles.append(("completions", f"{figures.completions:,}", many))
    if facts.unique_rows is not None:
        share = format_share(facts.unique_rows, figures.results)
        tiles.append(("different texts", f"{facts.unique_rows:,}", f"{share} of the results"))
    if facts.seconds is not None:
        tiles.append(("last run", _duration(facts.seconds), _pace(facts)))
    shown = "".join(
        f'<div class="tile{" wrong" if name == "failed" and figures.failed else ""}">'
        f'<dt>{name}</dt><dd>{value}</dd><dd class="note">{note}</dd></div>'
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{shown}</dl>'


def _pace(facts: ReportFacts) -> str:
    if facts.generated_tokens is None or not facts.seconds:
        return "without loading the model"
    return f"{facts.generated_tokens / facts.seconds:,.0f} tokens a second"


# ------------------------------------------------------------------------ pictures
def _cards(facts: ReportFacts, figures: JobFigures) -> str:
    whole = ValueScale(lambda value: f"{value:,.0f}", is_whole=True)
    cards = []
    if figures.completions:
        lengths = figures.lengths
        picture = draw_histogram(
            lengths.bars(), "Lengths", "completion", whole, {"median": lengths.quantile(0.5)}
        )
        note = (
            f"median {lengths.quantile(0.5):,.0f}, 95 % up to {lengths.quantile(0.95):,.0f}, "
            f"longest {lengths.quantile(1.0):,.0f} tokens"
        )
        cards.append(_card("Length of completions", "tokens", picture, note))
        cards.append(_finish_card(figures))
    if figures.voted:
        cards.append(_agreement_card(figures))
    if figures.scores.count:
        scores, scale = figures.scores, ValueScale(lambda value: f"{value:.6g}".replace("-", "−"))
        picture = draw_histogram(scores.bars(), "Scores", "row", scale, {"median": scores.quantile(0.5)})
        median, mean = (f"{value:.4g}".replace("-", "−") for value in (scores.quantile(0.5), scores.mean))
        note = f"median {median}, mean {mean}"
        cards.append(_card("Score of the selected completion", "score", picture, note))
    if sum(facts.drafted):
        accepted, drafted = sum(facts.accepted), sum(facts.drafted)
        picture = draw_acceptance(facts.drafted, facts.accepted, "Accepted drafts")
        note = f"{accepted:,} of {drafted:,} draft tokens accepted: {format_share(accepted, drafted)}"
        cards.append(_card("Accepted drafts", "position in the draft", picture, note))
    # Four in pairs: three and one below would leave a gap.
    return _section("", "".join(cards), "cards pairs" if len(cards) in (2, 4) else "cards")


def _agreement_card(figures: JobFigures) -> str:
    mean, scale = figures.mean_agreement, ValueScale(lambda value: f"{100 * value:.4g} %")
    picture = draw_histogram(figures.agreement_bars(), "Agreement", "row", scale, {"mean": min(mean, 0.9999)})
    notes = [
        f"mean {format_share(round(mean * 10**6), 10**6)}",
        f"unanimous {format_share(figures.unanimous, figures.voted)}",
    ]
    if figures.unanswered:
        notes.append(f"{counted(figures.unanswered, 'row')} without an answer")
    return _card(
        "Agreement of the votes", "share of the samples with the row's answer", picture, ", ".join(notes)
    )


def _finish_card(figures: JobFigures) -> str:
    known = list(_FINISH_REASONS)
    reasons = sorted(
        figures.finish_reasons.items(),
        key=lambda item: (known.index(item[0]) if item[0] in known else len(known), item[0]),
    )
    names = [(_FINISH_REASONS.get(reason, reason), count) for reason, count in reasons]
    rows = "".join(
        f'<tr><td><span class="swatch share{index % NUM_SHARE_COLOURS}"></span>{_plain(name)}</td>'
        f"<td>{count:,}</td><td>{format_share(count, figures.completions)}</td></tr>"
        for index, (name, count) in enumerate(names)
    )
    note = f"{counted(figures.completions, 'completion')}"
    table = f'<table class="figures"><tbody>{rows}</tbody></table>'
    return _card("Why completions ended", "", draw_shares(names, "Finish reasons") + table, note)


def _card(title: str, unit: str, picture: str, note: str) -> str:
    scale = f'<p class="unit">{unit}</p>' if unit else ""
    return f'<figure class="card"><h2>{title}</h2>{picture}{scale}<figcaption>{note}</figcaption></figure>'


# ------------------------------------------------------------------------ rows
def _errors(figures: JobFigures) -> str:
    if not figures.failed:
        return ""
    rows = "".join(
        f'<tr><td class="number">{found.count:,}</td><td>{_plain(reason, _MAX_VALUE_CHARS)}'
        f'<p class="example">row {_value(found.row)}: {_plain(found.message, _MAX_VALUE_CHARS)}</p>'
        "</td></tr>"
        for reason, found in figures.top_reasons()
    )
    more = counted(len(figures.reasons) - len(figures.top_reasons()), "more reason")
    note = "" if more.startswith("0 ") else f'<p class="note">{more} in the files of errors</p>'
    head = "<thead><tr><th>rows</th><th>reason</th></tr></thead>"
    table = f'<table class="errors">{head}<tbody>{rows}</tbody></table>'
    return _section("Rows without a result", table + note)


def _sample(figures: JobFigures) -> str:
    if not figures.sample:
        return ""
    title = (
        f"The first {counted(len(figures.sample), 'row')}" if figures.results > SAMPLED_ROWS else "All rows"
    )
    return _section(title, "".join(_row(record) for record in figures.sample), "rows")


def _row(record: Mapping[str, Any]) -> str:
    name = _value(record["id"]) if "id" in record else f"{record['row']}"
    kept = [(key, value) for key, value in record.items() if key not in _RESULT_KEYS]
    columns = "".join(
        f"<dt>{_plain(key)}</dt><dd>{_value(value, _MAX_VALUE_CHARS)}</dd>"
        for key, value in kept[:_MAX_SHOWN_COLUMNS]
    )
    completions = "".join(map(_completion, record["completions"][:_MAX_SHOWN_COMPLETIONS]))
    num_more = len(record["completions"]) - _MAX_SHOWN_COMPLETIONS
    more = counted(num_more, "more completion")
    return (
        f'<article class="row"><h3>row {name}</h3>'
        + (f'<dl class="columns">{columns}</dl>' if columns else "")
        + completions
        + (f'<p class="note">{more}</p>' if num_more > 0 else "")
        + "</article>"
    )


def _completion(completion: Mapping[str, Any]) -> str:
    facts = [
        counted(completion["tokens"], "token"),
        _plain(_FINISH_REASONS.get(completion["finish_reason"], str(completion["finish_reason"]))),
    ]
    if "score" in completion:
        facts.append(f"score {_value(completion['score'])}")
    if "votes" in completion:
        facts.append(counted(completion["votes"], "vote"))
    text, answer = completion["text"].strip(), completion.get("answer")
    shown = _plain(text, _MAX_TEXT_CHARS, keep="\n\t") or '<span class="mark">no text</span>'
    shown = f'<p class="text">{shown}</p>'
    if answer is not None:
        key = '<span class="key">answer</span>'
        shown += f'<p class="answer">{key} {_plain(answer, _MAX_VALUE_CHARS)}</p>'
    return f'<div class="completion">{shown}<p class="note">{" · ".join(facts)}</p></div>'


# ------------------------------------------------------------------------ text
def _section(title: str, content: str, kind: str = "") -> str:
    if not content:
        return ""
    heading = f"<h2>{title}</h2>" if title else ""
    return f'<section class="{kind}">{heading}{content}</section>'


def _plain(text: str, limit: int = _MAX_NAME_CHARS, keep: str = "") -> str:
    """Untrusted text: cut, escaped, and with its invisible characters marked."""
    pieces = escape_invisible(text[:limit], keep=keep)
    shown = "".join(
        f'<span class="mark">{html.escape(piece)}</span>' if is_escape else html.escape(piece)
        for piece, is_escape in pieces
    )
    more = len(text) - limit
    return shown + (f'<span class="mark"> … {more:,} more characters</span>' if more > 0 else "")


def _value(value: Any, limit: int = _MAX_NAME_CHARS) -> str:
    """A value of a column or setting; what is no text is JSON."""
    if isinstance(value, str):
        return _plain(value, limit)
    return _plain(json.dumps(value, ensure_ascii=False, default=str), limit)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
