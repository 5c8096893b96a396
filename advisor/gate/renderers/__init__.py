"""What a gate answers, in words: one file a format."""
