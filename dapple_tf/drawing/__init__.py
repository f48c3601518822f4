"""Draw charts as PNG, web page or Chrome trace, and tables as text."""
