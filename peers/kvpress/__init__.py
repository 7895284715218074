"""kvpress 0.5.5, in an environment of its own (`make peers`): what its presses keep, and what they hold in memory."""
