"""What a request's text may be: grammars (llguidance), and rules on ids. A constraint is made of a
`TextRules`, which can be sent to other processes, and the model's `Vocabulary`."""
