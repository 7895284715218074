"""To what level the cache is cut, round by round of an answer: one file a schedule."""
