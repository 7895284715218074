"""The ceiling: what each rule keeps of every row, beside the forced optimum of its candidate set."""
