"""May it ship: paired tests of a compressed model against its original."""
