"""How far spliced answers are from full prefill on the loaded model, and what is served in the light of that."""
