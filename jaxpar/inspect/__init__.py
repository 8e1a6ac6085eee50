"""What a strategy computes and costs, shown from the program itself."""
