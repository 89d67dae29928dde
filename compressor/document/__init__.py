"""One way to say it: blocks that every subject builds once, and a renderer for each medium."""
