"""What a run found, as one page to read and figures to show; and two runs beside each other."""
