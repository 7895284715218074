"""Speed side by side in one run, as ratios; never a timed test."""
