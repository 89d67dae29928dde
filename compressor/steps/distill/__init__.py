"""What is lost, trained back; CoMoE."""
