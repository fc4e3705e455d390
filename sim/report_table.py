"""The table of a report: what each peer scored, in percent, and their means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sim.records import Run
from sim.terminal import group_style, new_table, percent

if TYPE_CHECKING:
    from sim.report import Summary


def peer_table(run: Run, summary: Summary, console: Console) -> Table:
    """Return the table of accuracies in percent, a row per peer in label group order."""
    table = new_table(console)
    table.add_column("peer", no_wrap=True, max_width=24)
    headings: tuple[str, ...] = ("test", "mixture", "own", "local-only", "gain", "MB sent")
    if summary.personalized:
        headings = ("test", "mix", "mem", "both", "lam", "own", "local", "gain", "MB sent")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for name in run.weight_matrix().by_group().rows:
        table.add_row(
            Text(name, style=group_style((run.label_groups or {}).get(name))),
            str(summary.num_test[name] or "-"),
            *_line_of(summary, name).cells(summary),
            f"{summary.bytes_sent[name] / 1e6:.1f}",
            _note(summary, name),
        )
    table.add_section()
    for label, line in _mean_lines(summary).items():
        table.add_row(label, "", *line.cells(summary), style="bold")
    return table


def compression_remark(summary: Summary) -> str | None:
    """Return what compressed memories save and lose, as means over those peers; None without any.

    A peer that chose λ on no examples has no accuracy there.
    """
    sizes = _pairs(summary.exact_memory_bytes, summary.memory_bytes)
    if not sizes:
        return None
    before, after = (sum(each) / len(sizes) / 1024 for each in zip(*sizes, strict=True))
    remark = f"compressed memories: {after:.1f} of {before:.1f} KiB"
    accuracies = _pairs(summary.exact_holdout_memory_accuracy, summary.holdout_memory_accuracy)
    if accuracies:
        exact, kept = (sum(each) / len(accuracies) for each in zip(*accuracies, strict=True))
        remark += f", memory {percent(exact)} -> {percent(kept)} on the holdouts"
    return f"{remark}; means of {len(sizes)} peers"


def clustering_remark(
    digests: Mapping[str, str | None], tellers: Mapping[str, str | None] | None = None
) -> str:
    """Return whether all peers found the same clustering, and who didn't.

    Whoever clusters has everybody's models: who found another clustering had other models, or
    lacked some.

    Args:
        digests: By peer, of at least one; None where a peer clustered nothing.
        tellers: Who told each of it, itself where it clustered; None where that isn't known.
    """
    times = Counter(digest for digest in digests.values() if digest is not None)
    common = min(times, key=lambda digest: (-times[digest], digest))
    if times[common] == len(digests):
        same = f"all {len(digests)} peers found the same clustering (digest {common})"
        return same + _told(tellers or {})
    others = [name for name, digest in digests.items() if digest not in (None, common)]
    nothing = [name for name, digest in digests.items() if digest is None]
    remark = f"{times[common]} of {len(digests)} peers found one clustering (digest {common})"
    if others:
        remark += f"; found another: {', '.join(others)}"
    remark += f"; clustered nothing: {', '.join(nothing)}" if nothing else ""
    return remark + _told(tellers or {})


def _told(tellers: Mapping[str, str | None]) -> str:
    times = Counter(teller for name, teller in tellers.items() if teller not in (None, name))
    return "".join(f"; {teller} told {times[teller]} of them" for teller in sorted(times))


def _pairs(
    before: Mapping[str, float | None] | None, after: Mapping[str, float | None] | None
) -> list[tuple[float, float]]:
    """Return the values of the peers that have both."""
    pairs = ((value, (after or {}).get(name)) for name, value in (before or {}).items())
    return [(one, other) for one, other in pairs if one is not None and other is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Accuracies of one row of the table, and the λ of its blend."""

    mixture: float | None
    memory: float | None = None
    blend: float | None = None
    lam: float | None = None
    own: float | None = None
    local: float | None

    def cells(self, summary: Summary) -> Sequence[str | Text]:
        """Return them as the table shows them; the gain is of what peers predict with."""
        lam = "" if self.lam is None else f"{self.lam:g}"
        personal = (percent(self.memory), percent(self.blend), lam)
        predicted = self.blend if summary.personalized else self.mixture
        return (
            percent(self.mixture),
            *(personal if summary.personalized else ()),
            percent(self.own),
            percent(self.local),
            _difference(predicted, self.local),
        )


def _line_of(summary: Summary, name: str) -> _Line:
    return _Line(
        mixture=summary.accuracy[name],
        memory=(summary.memory_accuracy or {}).get(name),
        blend=(summary.blend_accuracy or {}).get(name),
        lam=(summary.lam or {}).get(name),
        own=summary.own_accuracy[name],
        local=summary.local_accuracy[name],
    )


def _mean_lines(summary: Summary) -> dict[str, _Line]:
    return {
        "mean": _Line(
            mixture=summary.mean,
            memory=summary.memory_mean,
            blend=summary.blend_mean,
            own=summary.own_mean,
            local=summary.local_mean,
        ),
        "weighted mean": _Line(
            mixture=summary.weighted_mean,
            blend=summary.weighted_blend_mean,
            local=summary.weighted_local_mean,
        ),
        "bottom decile": _Line(
            mixture=summary.bottom_decile,
            blend=summary.blend_bottom_decile,
            local=summary.local_bottom_decile,
        ),
    }


def _difference(accuracy: float | None, local: float | None) -> Text:
    if accuracy is None or local is None:
        return Text("-")
    style = "green" if accuracy > local else "red" if accuracy < local else ""
    return Text(f"{100 * (accuracy - local):+.1f}", style=style)


def _note(summary: Summary, name: str) -> Text:
    if name in summary.unfinished:
        return Text("not finished", style="yellow")
    if name in summary.untested:
        return Text("no test data", style="dim")
    if name in summary.below_local:
        return Text("below local-only", style="bold red")
    return Text("")
