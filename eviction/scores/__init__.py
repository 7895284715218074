"""What makes an entry worth keeping: one file a score."""
