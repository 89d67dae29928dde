"""A strategy, a step and an exporter for moe-compressor."""
