"""Callbacks for the Trainers of other libraries; importing this imports none of them.

hugging_face: the callback of Hugging Face's Trainer
lightning: the callback of Lightning's Trainer
followed_job: what both do with the job
"""
