"""How what is kept is held: one file a state."""
