"""What each colour means, in every plot and panel.

The palette is Okabe and Ito's (2008, "Color Universal Design"), told apart with the common colour blindnesses. A colour
belongs to a way: sky blue is weights on their way in, purple gradients on their way out, green the optimizer,
vermillion saved inputs. A tint is the same way in the other direction, or the lesser half of a pair.
"""

from __future__ import annotations

SKY, BLUE, PURPLE, ORANGE = "#56B4E9", "#0072B2", "#CC79A7", "#E69F00"
GREEN, YELLOW, VERMILLION, GREY = "#009E73", "#F0E442", "#D55E00", "#999999"
VERMILLION_TINT, GREY_TINT, YELLOW_TINT, GREEN_TINT, GREEN_SHADE = "#EAAF80", "#CCCCCC", "#F8F1A0", "#80CFB9", "#00634A"
PALE = "rgba(128,128,128,0.18)"
GRID = "rgba(128,128,128,0.22)"
INK = "#777777"  # readable on white and on black, for whoever does not set a font colour

OP_COLOURS = {
    "load": SKY,
    "record": GREY,
    "forward": BLUE,
    "score": YELLOW_TINT,
    "head": YELLOW,
    "norm": GREY_TINT,
    "backward": ORANGE,
    "unload": PURPLE,
    "update": GREEN,
    "offload": VERMILLION_TINT,
    "fetch": VERMILLION,
    "load state": GREEN_TINT,
    "adamw": GREEN,
    "store": GREEN_SHADE,
}
WAIT_COLOURS = {
    "weights": SKY,
    "gradient buffer": PURPLE,
    "saved inputs": VERMILLION,
    "optimizer": GREEN,
    "optimizer state": GREEN_TINT,
    "other": GREY,
}
STATE_COLOURS = {
    "free": PALE,
    "loading": SKY,
    "ready": YELLOW,
    "in_use": BLUE,
    "draining": PURPLE,
}
GRADIENT_COLOURS = {
    "empty": PALE,
    "arriving": PURPLE,
    "waiting for AdamW": YELLOW,
    "being applied": GREEN,
}
