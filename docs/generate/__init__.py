"""What the documentation's pages are made of besides what is written by hand: names, figures, tables and pictures."""
