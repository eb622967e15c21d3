"""The papers' claims as files, and verdicts on them: per claim, per table, and as a page."""
