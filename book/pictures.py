"""Draw the two pictures of README from the recorded results: `python book/pictures.py`.

The numbers drawn are stored inside each picture; a test compares them with the CSV, so that the two cannot drift apart.
"""

import json
from pathlib import Path

from flashlib import bench, style
from flashlib.bench import read_results

PICTURE = Path(__file__).resolve().parent / "_static" / "payoff.png"
SPEED = PICTURE.with_name("speed.png")
LABELS = {"naive": "as separate kernels", "fa2": "FlashAttention-2"}
HEAD_DIM = 128


def payoff():
    """Return what is drawn.

    Returns:
        dict: gpu (str), torch (str), tokens (int: sequences times their length), nheads (int), and for "naive" and for
        "fa2" a list of [seqlen, milliseconds, extra bytes], forward, not causal, head_dim 128.
    """
    rows = [
        row
        for row in read_results("cost")
        if row["pass"] == "fwd" and row["head_dim"] == HEAD_DIM and not row["causal"] and row["impl"] in LABELS
    ]
    drawn = {key: rows[0][key] for key in ("gpu", "torch", "nheads")}
    drawn["tokens"] = rows[0]["batch"] * rows[0]["seqlen_q"]
    for name in LABELS:
        mine = sorted((row for row in rows if row["impl"] == name), key=lambda row: row["seqlen_q"])
        drawn[name] = [[row["seqlen_q"], row["ms_p50"], row["peak_bytes"]] for row in mine]
    return drawn


def draw(drawn, path=PICTURE):
    """Draw time and extra memory against the sequence length, side by side, and store the numbers in the file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style.use()
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.8))
    # Colour, marker, dash, and where the last value is written: the upper line's above it, the lower line's below.
    looks = {"naive": (style.NAIVE, "s", "--", 7), "fa2": (style.FLASH, "o", "-", -16)}
    for axes, column, unit, title in (
        (left, 1, 1, "Time of one call (ms)"),
        (right, 2, 1e9, "Memory it takes beyond its inputs (GB)"),
    ):
        for name, label in LABELS.items():
            colour, marker, dash, offset = looks[name]
            lengths = [row[0] for row in drawn[name]]
            values = [row[column] / unit for row in drawn[name]]
            axes.plot(lengths, values, color=colour, marker=marker, linestyle=dash, label=label)
            axes.annotate(
                f"{values[-1]:.2g}",
                (lengths[-1], values[-1]),
                xytext=(0, offset),
                textcoords="offset points",
                ha="center",
                color=colour,
                fontweight="bold",
                fontsize=9,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([row[0] for row in drawn["fa2"]], [f"{row[0]}" for row in drawn["fa2"]], rotation=30)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.margins(x=0.08, y=0.16)
        axes.set_xlabel("sequence length (tokens)")
        axes.set_title(title)
    left.legend(loc="upper left")
    fig.supxlabel(
        f"Attention, forward, bf16, {drawn['tokens']} tokens in all, {drawn['nheads']} heads of {HEAD_DIM}. "
        f"{drawn['gpu']}, PyTorch {drawn['torch']}. Lower is better.",
        fontsize=8.5,
        color=style.GREY,
    )
    fig.savefig(path, dpi=160, metadata={"Description": json.dumps(drawn)})
    plt.close(fig)


def speed():
    """Return the rows of the benchmark against the peers that are drawn: those with head_dim 128."""
    return [row for row in read_results("attention") if row["head_dim"] == HEAD_DIM]


def draw_speed(rows, path=SPEED):
    """Draw the benchmark's own chart of these rows, and store them in the file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style.use()
    figure = bench.chart(rows)
    figure.savefig(path, dpi=160, metadata={"Description": json.dumps(rows)})
    plt.close(figure)


if __name__ == "__main__":
    draw(payoff())
    draw_speed(speed())
    print(f"drawn: {PICTURE.name}, {SPEED.name}")
