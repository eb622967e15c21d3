"""What the papers claim, as files, and what runs say of it: judged, beside a table, and as a page of all."""
