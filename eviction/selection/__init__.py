"""Which entries stay, given scores and counts: one file a selector."""
