"""Manual pages made of the commands' own help and the texts beside them."""
