# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the launch benchmark found, as a table and as a chart."""

from pathlib import Path
from typing import Any

__all__ = ["AGAIN", "FLOOR", "OP", "bars", "chart", "table"]

FLOOR, AGAIN = "C driver call", "C driver call, again"
OP = "metrale.ops"

Row = dict[str, Any]


def table(facts: dict[str, Any]) -> str:
    """The results in Markdown, and why others are missing."""
    noops, ops = _noops(facts), _ops(facts)
    counts = sorted({count for rows in noops.values() for count in rows})
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    lines = [
        f"{facts['cpu']}; {packages}.",
        "",
        f"Microseconds a launch, median of {facts['rounds']} rounds of {facts['batch']} launches. In brackets, what "
        "of it is over the C driver call: the median of the differences in a round, which the target is for, and the "
        "difference of the medians. The kernels do nothing.",
        "",
        *_head("way", *[f"{n} arguments" for n in counts], "target"),
    ]
    for way, rows in noops.items():
        lines.append(_line(way, *[_cell(rows.get(n)) for n in counts], _target(list(rows.values()))))
    lines += [
        "",
        "Launchers of `metrale.ops`, called from Python, beside the C driver call for the same kernel and arguments:",
        "",
        *_head("launcher", FLOOR, "again", "launcher", "target"),
    ]
    for kernel, ways in ops.items():
        name = f"`{kernel}`, {ways[FLOOR]['arguments']} arguments"
        lines.append(_line(name, *[_cell(ways.get(way)) for way in (FLOOR, AGAIN, OP)], _target(list(ways.values()))))
    missing: dict[tuple[str, str], list[str]] = {}
    for failure in facts["not_measured"]:
        missing.setdefault((failure["way"], failure["reason"]), []).append(failure["kernel"])
    lines += [f"\nNot measured: {way} ({', '.join(kernels)}): {why}" for (way, why), kernels in missing.items()]
    return "\n".join(lines)


def bars(facts: dict[str, Any]) -> dict[str, dict[int, float]]:
    """The chart's bars: microseconds over the C driver call by number of arguments, for each way and launcher."""
    groups = {way: list(rows.values()) for way, rows in _noops(facts).items() if way != FLOOR}
    groups |= {f"ops.{kernel}": [ways[OP]] for kernel, ways in _ops(facts).items() if OP in ways}
    return {label: {row["arguments"]: row["over_c_ns"] / 1e3 for row in rows} for label, rows in groups.items()}


LINEAR_US = 0.1  # microseconds: what is shorter is drawn to scale, what is longer by its logarithm


def chart(facts: dict[str, Any], path: Path) -> None:
    """The bars as an SVG file."""
    import matplotlib
    from matplotlib.figure import Figure

    groups = bars(facts)
    counts = sorted({count for group in groups.values() for count in group})
    height = 0.8 / len(counts)
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "metrale"}
    ):  # the same bytes for the same facts
        figure = Figure(figsize=(9, 1.5 + 0.55 * len(groups)), layout="constrained")
        axes = figure.subplots()
        for place, count in enumerate(counts):
            at = [(i, group[count]) for i, group in enumerate(groups.values()) if count in group]
            drawn = axes.barh(
                [i + (place - (len(counts) - 1) / 2) * height for i, _ in at],
                [us for _, us in at],
                height,
                label=f"{count} arguments",
            )
            axes.bar_label(drawn, [f"{us:+.2f}" for _, us in at], padding=3, fontsize=8)
        axes.set_yticks(range(len(groups)), list(groups))
        axes.invert_yaxis()
        axes.set_xscale("symlog", linthresh=LINEAR_US)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(x=0.12)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel(f"microseconds a launch over the C driver call, logarithmic from {LINEAR_US}")
        axes.set_title("{gpu}, driver {driver}, {date}, commit {commit}".format(**facts), fontsize=10)
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _noops(facts: dict[str, Any]) -> dict[str, dict[int, Row]]:
    """The rows of the kernels that do nothing, by way and number of arguments; in the order of the most arguments,
    which all ways take."""
    found: dict[str, dict[int, Row]] = {}
    for row in sorted(facts["rows"], key=lambda row: -row["arguments"]):
        if row["kernel"].startswith("noop"):
            found.setdefault(row["way"], {})[row["arguments"]] = row
    return found


def _ops(facts: dict[str, Any]) -> dict[str, dict[str, Row]]:
    """The rows of the package's kernels, by kernel and way."""
    found: dict[str, dict[str, Row]] = {}
    for row in facts["rows"]:
        if not row["kernel"].startswith("noop"):
            found.setdefault(row["kernel"], {})[row["way"]] = row
    return found


def _head(first: str, *others: str) -> list[str]:
    return [_line(first, *others), "|---|" + "---:|" * len(others)]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    over = "" if row["way"] == FLOOR else f" ({row['over_c_ns'] / 1e3:+.2f}, {row['medians_over_c_ns'] / 1e3:+.2f})"
    return f"{row['ns'] / 1e3:.2f}{over}"


def _target(rows: list[Row]) -> str:
    """The target of those of the rows that have one, which is the same, and how many arguments miss it."""
    rows = [row for row in rows if "target_ns" in row]
    if not rows:
        return ""
    missed = [str(row["arguments"]) for row in rows if not row["met"]]
    return f"{rows[0]['target_ns'] / 1e3:+.2f}: " + (f"not met at {', '.join(missed)}" if missed else "met")
