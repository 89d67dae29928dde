"""From text to batches to the statistics of a layer."""
