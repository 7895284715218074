"""The pictures and the page: every figure is a table made from the analysis' tables, and a drawing of that table."""
