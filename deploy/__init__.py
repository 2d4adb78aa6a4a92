"""What Quotient is installed with: the Helm chart, the manifests rendered from it, and the image."""
