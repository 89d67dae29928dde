"""Colours, markers and resolution of every picture."""

DPI = 150
COLOURS = (  # "muted", Paul Tol's qualitative scheme that stays apart for colour-blind readers
    "#332288", "#CC6677", "#117733", "#88CCEE", "#DDCC77", "#882255", "#44AA99", "#AA4499", "#999933",
)  # fmt: skip
MARKERS = "osD^vPX<>"  # filled in the first round, hollow in the second
