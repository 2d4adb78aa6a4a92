"""What Quotient is installed with: the chart, the manifests rendered from it, and its image."""
