"""The report: ``collect`` reads a run, ``render`` turns it into a page, a summary and JSON.

Everything shown is in the collected data, which is also ``report/report.json``; templates and plots only draw it.
"""
