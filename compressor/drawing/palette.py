"""What all pictures share: colours by their roles, markers, resolution. Colour is never the only sign."""

from collections.abc import Mapping

DPI = 150
FONT = 8.0  # points
HEAT = "viridis"  # grows lighter for colour-blind readers and in grey, too
COLOURS = (  # "muted", Paul Tol's qualitative scheme that stays apart for colour-blind readers
    "#332288",
    "#CC6677",
    "#117733",
    "#88CCEE",
    "#DDCC77",
    "#882255",
    "#44AA99",
    "#AA4499",
    "#999933",
)
MARKERS = "osD^vPX<>"  # filled in the first round, hollow in the second
ROLES: Mapping[str, str] = {  # on white; in dark mode the page turns whole pictures
    "ink": "#000000",
    "paper": "#ffffff",
    "muted": "#57606b",
    "rule": "#d3d9df",
    "faint": "#e3e8ee",
    "before": "#5f6b78",
    "after": "#0b66b0",
    "kept": "#7b8b9c",
    "merged": "#6a3d9a",
    "dropped": "#b5480b",
    "good": "#1b6e3a",
    "bad": "#b3261e",
    "unsure": "#7a5600",
}


def ink_on(background: str) -> str:
    """Black or white, whichever is seen on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(background)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "#000000"
