"""How activations of models with one residual stream are kept."""

from __future__ import annotations

# Activations are kept times this, and what comes of them is multiplied by its inverse. The largest ones of published models reach
# some thousands, their sums over a lane more; binary16 ends at 65,504, so here it ends at 4 million. What becomes smaller than
# its smallest normal value is rounded to 2**-25, four millionths of an activation of 1/2.
ACTIVATION_SCALE = 2.0**-6
