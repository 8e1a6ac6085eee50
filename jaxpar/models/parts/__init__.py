"""What models share: sizes, losses on text and images, stacked layers."""
