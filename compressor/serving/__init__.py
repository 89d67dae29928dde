"""What servers ask of a Mixture-of-Experts model."""
