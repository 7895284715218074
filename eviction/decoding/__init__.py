"""What stays of the text that the model writes, because of what it says: one file a rule."""
