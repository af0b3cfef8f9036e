"""What commands print for a person."""
