"""The HTML page of a report: its data, its template, its style and its scripts."""
