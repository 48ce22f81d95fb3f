# SPDX-License-Identifier: MIT OR Apache-2.0
"""A capture as a picture: live bytes over time, stacked by tag."""

import os

from metrale.audit.capture import BackendCapture, Capture
from metrale.audit.tables import GROUPINGS, groups, leaks
from metrale.audit.text import backend_line
from metrale.errors import MetraleError

__all__ = ["draw"]

TAGS = 8
"""Tags with a colour of their own; the others share grey."""
COLOURS = ("#2f6fde", "#e07b39", "#2a9d74", "#b04fc4", "#d1a11f", "#3aa6c9", "#d65a86", "#7a8f2a")
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def draw(capture: Capture, path: str | os.PathLike[str]) -> None:
    """Write a PNG, a panel a backend."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MetraleError(f"a picture needs matplotlib: pip install 'metrale[audit]' ({error})") from error
    panels = max(len(capture.backends), 1)
    figure = Figure(figsize=(11, 4.2 * panels), layout="constrained")
    axes = figure.subplots(panels, squeeze=False)[:, 0]
    for axis, backend in zip(axes, capture.backends, strict=False):
        times, names, layers = _layers(capture, backend)
        unit, unit_name = next((u for u in UNITS if backend.peak_bytes >= u[0]), UNITS[-1])
        stacked = [[value / unit for value in layer] for layer in layers]
        if times:
            axis.stackplot(
                times,
                stacked,
                labels=list(map(_label, names)),
                colors=[*COLOURS[: len(names) - 1], "#9aa0a6"],
                step="post",
            )
            axis.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False, reverse=True)
        lost = leaks(backend)
        axis.set_title(
            f"{backend_line(backend)}: peak {backend.peak_bytes:,} bytes, {len(lost)} leaked", loc="left", fontsize=10
        )
        axis.axhline(backend.peak_bytes / unit, color="#888888", linewidth=0.8, linestyle="--")
        axis.set_xlabel("seconds since the first backend was opened")
        axis.set_ylabel(f"live {unit_name}")
        axis.margins(x=0)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=130)


def _layers(capture: Capture, backend: BackendCapture) -> tuple[list[float], list[str], list[list[int]]]:
    """Times, names, and the live bytes of each name at each time; the last name takes what the others leave."""
    tag = GROUPINGS["tag"]
    names = [group.name for group in groups(backend, "tag")[:TAGS]]
    place = {name: i for i, name in enumerate(names)}
    live = [0] * (len(names) + 1)
    times: list[float] = []
    layers: list[list[int]] = [[] for _ in live]
    for event in backend.timeline:
        if event.entry.kind == "pinned":
            continue
        live[place.get(tag(event.entry), len(names))] += event.entry.nbytes if event.born else -event.entry.nbytes
        times.append((event.time_ns - capture.process.start_ns) / 1e9)
        for layer, value in zip(layers, live, strict=True):
            layer.append(value)
    if times:  # what lives at the end lives to the end
        times.append((capture.process.end_ns - capture.process.start_ns) / 1e9)
        for layer, value in zip(layers, live, strict=True):
            layer.append(value)
    return times, [*names, "others"], layers


def _label(name: str) -> str:
    """A name that matplotlib neither hides, for an underscore, nor takes for a formula."""
    return f" {name}".replace("$", r"\$")
