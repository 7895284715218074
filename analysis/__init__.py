"""What the numbers say: ceiling, penalty, predictor, rules and map, each with its uncertainty."""
