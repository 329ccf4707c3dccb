"""The clients. The defense is one line: uncomment it, and the spy's files say less."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

# from gradveil.federated import defend
from quickstart.task import Net, load_share, train

app = ClientApp()


# @app.train(mods=[defend("prune:0.95")])
@app.train()
def train_client(message: Message, context: Context) -> Message:
    """Train on this client's images and send the weights back."""
    config = context.run_config
    images, labels = load_share(int(context.node_config["partition-id"]), int(config["images"]))
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(
        model,
        images,
        labels,
        int(config["local-epochs"]),
        int(config["batch-size"]),
        float(config["learning-rate"]),
    )
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(images)}),
        }
    )
    return Message(content, reply_to=message)
