"""What every process of Quotient reads at its start: configuration, and how to log."""
