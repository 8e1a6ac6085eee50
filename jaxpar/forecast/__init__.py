"""What a step would cost elsewhere: plans, and reports of steps that jaxpar did not make."""
