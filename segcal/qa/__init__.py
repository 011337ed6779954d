"""Quality assurance without ground truth: expected Dice, volumes, disagreement, outlyingness, and who needs a look."""
