"""The processes of one run: how they find each other, compare notes, watch each other, and end together."""
