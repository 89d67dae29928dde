"""What shall be done, as data that can be read, edited, checked and carried out."""
