"""What people see of a run: the terminal, plots and reports."""
