"""What a drafter is worth: running prompts, comparing texts, statistics, tables and plots."""
