"""The splice oracle: a served prompt with spliced facts against one forward of the reference model.

A fact was encoded somewhere else: behind the chat template, the header and the facts that its policy put in front of
it. Its keys were then rotated from the positions of that prompt to those of the served one. What the server computes
with them is fully determined, and so can be computed independently of how the server does it: the reference model
reads the served prompt in one forward, in which a mask lets each fact see what its encoding saw, and nothing else.
Where the two disagree, a key was rotated wrongly, a fact sees what it must not, or a wrong encoding was served. No
average of losses shows that: a rotation off by one hardly moves the likelihood of an answer.
"""
