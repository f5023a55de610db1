"""What commands do with mounts: make, find, ask and end them, and show what they tell."""
