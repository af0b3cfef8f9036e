"""What a log can be asked beyond reading it: exports, traces, runs played again, what could have been."""
