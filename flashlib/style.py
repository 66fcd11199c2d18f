"""One look for every figure: colours that colour-blind readers can tell apart, and a second cue for greyscale.

The colours are Okabe and Ito's (https://jfly.uni-koeln.de/color/). Figures are drawn on white; the book's dark
theme inverts their lightness and keeps their hues, so one stored picture serves both.
"""

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
YELLOW = "#F0E442"
BLACK = "#1A1A1A"
GREY = "#7A7A7A"
PALE = "#E8E8E8"

# What the colours mean on every page.
NAIVE = RED
FLASH = BLUE
PEER = GREY
HBM = ORANGE
SRAM = GREEN
# Tiles of a mask: empty ones are skipped, full ones need no test, partial ones are tested element by element.
TILE_EMPTY = "#FFFFFF"
TILE_PARTIAL = ORANGE
TILE_FULL = BLUE

# Lines differ in colour, dash and marker: the figure still reads when printed in grey.
_COLOURS = [BLUE, RED, GREEN, ORANGE, PURPLE, SKY, BLACK]
_DASHES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), "-"]
_MARKERS = ["o", "s", "^", "D", "v", "P", "x"]


def use():
    """Make every matplotlib figure of this process follow the course's style."""
    import matplotlib
    from cycler import cycler

    matplotlib.rcParams.update(
        {
            "figure.figsize": (7.0, 3.6),
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "axes.facecolor": "white",
            "axes.edgecolor": GREY,
            "axes.labelcolor": BLACK,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": cycler(color=_COLOURS) + cycler(linestyle=_DASHES) + cycler(marker=_MARKERS),
            "grid.color": PALE,
            "grid.linewidth": 0.8,
            "lines.linewidth": 1.8,
            "lines.markersize": 5,
            "legend.frameon": False,
            "legend.fontsize": 9,
            "xtick.color": BLACK,
            "ytick.color": BLACK,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "font.size": 10,
            "font.family": "DejaVu Sans",
        }
    )
